"""A queue of runs whose results accumulate in one file. A run with a result there is done, on any machine."""
