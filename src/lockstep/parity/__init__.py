"""Tests whether two runs train alike, and locates their first difference. May be imported only by the command line."""
