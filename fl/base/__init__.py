"""What every room needs: errors, files, tables, random numbers, types of flags, what packages declare."""
