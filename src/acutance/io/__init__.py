"""Models and profiles to and from files, and models by name."""
