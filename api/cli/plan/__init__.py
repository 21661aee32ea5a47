"""`lorasrv plan`: capacity planning from recorded traffic."""
