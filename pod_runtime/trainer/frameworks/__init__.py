"""The parts that the loop needs of a framework, and one folder per framework that implements it."""
