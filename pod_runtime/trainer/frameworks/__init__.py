"""What the elastic loop needs of a framework, and the adapters that give it."""
