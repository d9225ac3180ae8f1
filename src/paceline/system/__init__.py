"""The operating system: CPU, memory, processes, signals and the terminal."""
