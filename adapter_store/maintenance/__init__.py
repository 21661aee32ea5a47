"""gc, fsck, export, import of a store that no server has open."""
