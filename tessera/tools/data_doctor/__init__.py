"""The command `tessera data doctor`: find problems of data sets before training, and name fixes."""
