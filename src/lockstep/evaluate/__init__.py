"""Evaluates a model: its answers to questions, and its loss on rows. Training loops and commands import this
package."""
