"""Hand out the tasks of a data set, each once in each pass. Pure."""
