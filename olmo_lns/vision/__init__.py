"""Image classification under the four arms of the papers' table: that the recipe works, on very small images."""
