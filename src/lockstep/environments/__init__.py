"""Environments: conversations of the policy with tools and games. `methods`, `train` and higher layers may import this
package."""
