"""The student's side, in its training process: the reader, the clients of teachers, the losses."""
