"""Environments of other packages: `rollout.environment: gymnasium:FrozenLake-v1`. A host process imports a package only
if the recipe names it."""
