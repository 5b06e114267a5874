"""One workload twice: real processes under a live service, and the simulator. How far apart are they?"""
