"""CPU kernels: see the room's lowering for formulas and shapes."""
