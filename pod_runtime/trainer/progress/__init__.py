"""How far a training is, and which samples count. Only the ledger touches a file."""
