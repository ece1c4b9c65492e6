"""What a request says to the model: tokens and images, and whether they fit."""
