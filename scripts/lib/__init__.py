"""What several stage scripts share. Nothing here runs by itself."""
