"""The program that ``dtrun --check`` runs on each host.

A job takes ports that the kernel picks, of a range. So one that the kernel picks is opened, and the first and the last
of the range that are free, by IPv4 and by IPv6; then those of the other hosts are tried, by the kinds of address that
their names have.
"""

from ..runtime.host.versions import PACKAGES

#: Seconds for a connection between two hosts.
REACH = 5.0

#: Runs on a host, with any Python 3. Prints a line with what it is, then tries the addresses that come by stdin, all at
#: once: (name, address, {kind: ports}).
PROGRAM = """
import errno, json, platform, socket, sys, threading, time
NONE = errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT
KINDS = {"IPv4": (socket.AF_INET, "0.0.0.0"), "IPv6": (socket.AF_INET6, "::")}
told = {"python": platform.python_version(), "name": socket.gethostname(), "time": time.time()}
program = sys.executable
told["executable"] = program if len(program) <= 300 and program.isprintable() else ""
try:  # a Python that is too old for it says its version, which is enough
    import importlib.metadata as metadata, importlib.util
    for package, module in %p.items():
        try:
            there = getattr(importlib.util.find_spec(module), "origin", None)  # else it is a folder that pip has left
            told["package " + package] = metadata.version(package) if there else ""
        except metadata.PackageNotFoundError:  # it was put there in another way
            pass
except Exception:
    pass
try:
    from disttensor.runtime.protocol.bundle import PROTOCOL, VERSION
    told["disttensor"], told["protocol"] = VERSION, PROTOCOL
except Exception as e:
    told["no_disttensor"] = "%s: %s" % (type(e).__name__, e)
try:
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first, last = map(int, file.read().split())
except Exception:
    first, last = 32768, 60999
told["range"] = "%d-%d" % (first, last)
doors = []
def open_one(family, address, wanted):
    for port in wanted:
        door = socket.socket(family)
        try:
            if family == socket.AF_INET6:
                door.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            door.bind((address, port))
            door.listen(1024)
        except OSError:
            door.close()
            continue
        doors.append(door)
        return [door.getsockname()[1]]
    return []
for kind, (family, address) in KINDS.items():
    ports = []
    try:
        for wanted in ([0], range(first, first + 50), range(last, last - 50, -1)):
            ports += open_one(family, address, wanted)
    except OSError:
        pass
    told[kind] = " ".join(map(str, ports))
told["time"] = time.time()
print("dtrun-check " + json.dumps(told), flush=True)
line = sys.stdin.readline()
failed = {}
def reach(name, kind, where, port):
    try:
        with socket.socket(KINDS[kind][0]) as door:
            door.settimeout(%f)
            door.connect(where)
    except OSError as e:  # None: this host has none of this kind, and a job takes another
        failed[name, kind, port] = None if e.errno in NONE else str(e)
wanted, tries, reached = json.loads(line) if line else [], [], {}
for name, address, ports in wanted:
    reached[name] = "" if ports else "it could open no port"
    for kind in ports:
        try:
            where = socket.getaddrinfo(address, 9, KINDS[kind][0], socket.SOCK_STREAM)[0][4]
        except OSError as e:  # perhaps it has none of this kind
            reached[name] = str(e)
            continue
        tries += [(name, kind, (where[0], port) + where[2:], port) for port in ports[kind]]
    if any(one[0] == name for one in tries):
        reached[name] = ""
threads = [threading.Thread(target=reach, args=one, daemon=True) for one in tries]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for name, _, ports in wanted:
    for kind in ports:
        bad = [port for port in ports[kind] if (name, kind, port) in failed]
        if bad and (failed[name, kind, bad[0]] or not any(one[0] == name and one[1] != kind for one in tries)):
            some = "" if len(bad) == len(ports[kind]) else " at port " + " and ".join(map(str, bad))
            why = failed[name, kind, bad[0]] or "no route"
            reached[name] += "; " * bool(reached[name]) + "by %s%s: %s" % (kind, some, why)
print("dtrun-check " + json.dumps(reached), flush=True)
sys.stdin.readline()
""".replace("%f", str(REACH)).replace("%p", repr({**PACKAGES, "cryptography": "cryptography"}))
