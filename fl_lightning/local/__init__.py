"""What a client computes: solver, optimizers and gradient transforms on flat vectors."""
