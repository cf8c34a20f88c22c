"""How weights are held in memory and multiplied: one file for each way of holding them on a device. registry.py picks."""
