"""The training job as values, its accounts, and its moves from stage to stage. Pure."""
