"""What is PyTorch's alone. Nothing outside this folder imports it, but `choose`."""
