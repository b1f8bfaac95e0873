"""The page to look at runs: a local server that reads run folders by byte offsets, and the page it serves."""
