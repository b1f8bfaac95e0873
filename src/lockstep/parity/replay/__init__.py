"""A recorded run repeated elsewhere: a verdict for each stage, and the first place where it parts."""
