"""Loss landscapes: training paths and the loss around them, on one plane of weight space."""
