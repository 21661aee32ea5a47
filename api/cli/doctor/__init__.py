"""`lorasrv doctor`: checks of the machine, the files and the settings."""
