"""Libraries with training loops of their own, on Paceline's workers. Each module imports its library; nothing else does."""
