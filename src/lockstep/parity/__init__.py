"""Tests whether two runs train in step, and locates the first difference. May be imported only by the command line."""
