"""Libraries with training loops of their own, on Paceline's workers: each module here imports one."""
