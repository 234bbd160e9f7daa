"""Write kits of files to be timed on other devices, and read the tables of times that they measure."""
