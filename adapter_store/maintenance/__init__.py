"""Commands for a store that no server has open: gc, fsck, export, import."""
