"""What discovery servers, students and teachers say to each other."""
