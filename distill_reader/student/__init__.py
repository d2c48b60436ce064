"""What runs in a student's training process: the reader, its teachers' clients, the losses."""
