"""From a validated call to kernel launches, one module per op. Pure Python, needs no GPU."""
