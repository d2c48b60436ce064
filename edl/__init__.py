"""The command `edl VERB`, which runs the program of that verb; option types of the examples."""
