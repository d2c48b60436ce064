"""Who is a teacher, who is a student, and which teachers each student uses."""
