"""What every room needs: errors, files, random numbers, types of flags."""
