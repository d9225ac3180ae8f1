"""Live views of runs: HTTP server, terminal, Prometheus, and remote sources."""
