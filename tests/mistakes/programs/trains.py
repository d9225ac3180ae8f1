"""A script for `python`: it lets Paceline train."""

import paceline

if __name__ == "__main__":
    paceline.train(dataset="synthetic", strategy="sync", workers=2, epochs=1)
