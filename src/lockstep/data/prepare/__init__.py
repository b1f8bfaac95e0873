"""Files of rows made here: generated tasks, GSM8K, pairs of sampled responses. For the command line alone."""
