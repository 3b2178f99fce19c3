"""A queue of runs whose results accumulate in one file: what is there is done, on whichever machine it was made."""
