"""Commands on personas: their defaults as files, character cards and Modelfiles."""
