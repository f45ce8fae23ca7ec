"""Files of other tools that are pickles: read without executing anything, written for those who must hand them on."""
