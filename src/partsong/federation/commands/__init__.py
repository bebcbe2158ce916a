"""The commands `partsong federation` and `partsong audit`."""
