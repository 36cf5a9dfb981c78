"""Steps to time attention on: their floors, and other implementations beside ours."""
