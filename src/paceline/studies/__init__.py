"""Studies that make many runs: sweeps, scaling, plans, replays, published tables, loss landscapes."""
