"""Terminal output, options and formatting that several commands share."""
