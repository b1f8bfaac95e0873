"""Update rules of the optimizers: their state tensors, and how they change a parameter."""
