// NCCL without GPUs, preloaded behind the runtime (../runtime.cpp). docs/dev/simcuda.md says how it works.
//
// A communicator is a board in memory that its ranks share: a memfd of the process that made its id, which others open by
// /proc, so that nothing is left of one whose processes were killed. Each pair of ranks has a pipe there in each direction,
// and each operation is a task of a stream that sends and receives messages. Messages say what they are of: ranks that do
// different things are reported, and wait without end, as NCCL's do.
//
// What a task waits for may never come. It looks for an end (abort, an error that sticks, the interpreter's end) at least
// every LOOK.

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <math.h>
#include <poll.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

// What it uses of the runtime.
extern "C" {
int simcuda_launch(int device, void* stream, void (*call)(void*), void* data);
int simcuda_capturing(int device, void* stream);
char* simcuda_inside(const void* pointer, size_t size);
int simcuda_over();
void simcuda_break(int error);
void simcuda_unwritten(const char* name);
int cudaGetDevice(int* device);
int cudaGetDeviceCount(int* count);
int cudaSetDevice(int device);
int cudaDeviceGetPCIBusId(char* text, int length, int device);
int cudaEventCreateWithFlags(void** event, unsigned flags);
int cudaEventRecord(void* event, void* stream);
int cudaEventDestroy(void* event);
int cudaStreamWaitEvent(void* stream, void* event, unsigned flags);
}

namespace {

// Numbers of ncclResult_t.
enum Result : int {
    OK = 0, CUDA_ERROR = 1, SYSTEM_ERROR = 2, INTERNAL_ERROR = 3, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6,
    IN_PROGRESS = 7,
};
constexpr int ILLEGAL_ADDRESS = 700;  // of cudaError_t
constexpr int VERSION = 22907;        // of the header that torch 2.13 was built with
constexpr uint64_t PAGE = 4096, ROOM = 128 << 10;
constexpr auto LOOK = std::chrono::milliseconds(10);

struct Type { const char* name; int size; };
const Type TYPES[] = {{"int8", 1}, {"uint8", 1}, {"int32", 4}, {"uint32", 4}, {"int64", 8}, {"uint64", 8}, {"float16", 2},
                      {"float32", 4}, {"float64", 8}, {"bfloat16", 2}, {"float8e4m3", 1}, {"float8e5m2", 1}};
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8E4M3, FLOAT8E5M2, TYPES_ };
enum { SUM, PRODUCT, MAX, MIN, AVERAGE, OPS_ };
enum Kind : int { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, GATHER, SCATTER, REDUCE_SCATTER, ALL_TO_ALL, SEND, RECEIVE };
const char* const KINDS[] = {"all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter",
                             "all_to_all", "send"};

// ---- what ranks share

struct Pipe {
    std::atomic<uint64_t> asked, written, read;  // messages that the receiver has begun; bytes
    char data[ROOM] __attribute__((aligned(PAGE)));
};
struct Seat {
    std::atomic<int> here, pid, aborted;
    std::atomic<uint32_t> bell;
    char bus[16];
    std::atomic<uint64_t> split, heard;  // numbers of splits that it has told of, and has heard all of
    int color, key, fd;
    uint64_t inode;
} __attribute__((aligned(128)));
struct Head { std::atomic<int> size; };

struct Board {
    int fd = -1;
    uint64_t length = 0;
    char* at = nullptr;
    int size = 0;
    ~Board() { if (at) munmap(at, length); }
    bool open(int fd, int ranks) {
        size = ranks;
        length = pipes() + (uint64_t)ranks * ranks * sizeof(Pipe);
        struct stat status;
        if (fstat(fd, &status) || ((uint64_t)status.st_size < length && ftruncate(fd, length))) return false;
        void* mapped = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (mapped == MAP_FAILED) return false;
        at = (char*)mapped;
        return true;
    }
    uint64_t pipes() { return PAGE + (size * sizeof(Seat) + PAGE - 1) / PAGE * PAGE; }
    Head& head() { return *(Head*)at; }
    Seat& seat(int rank) { return ((Seat*)(at + PAGE))[rank]; }
    Pipe& pipe(int from, int to) { return ((Pipe*)(at + pipes()))[from * size + to]; }
};

// What a unique id's 128 bytes say.
struct Id {
    char sign[8];
    int pid, fd;
    uint64_t inode, chance[2];
};
static_assert(sizeof(Id) <= 128);
struct Bytes128 { char bytes[128]; };

// ---- what a process has

struct Scalar { bool on_device = false; char bytes[8] = {}; const void* at = nullptr; int type = 0; };
struct Operation {
    Kind kind;
    const void* from;
    void* to;
    uint64_t count;
    int type, op, root;  // or peer
    void* stream;
    Scalar scalar;       // what inputs are multiplied by, of operators with numbers of OPS_ and more
};

struct Comm {
    Board board;
    int rank = 0, size = 0, device = 0;
    bool blocking = true;
    std::mutex mutex;
    std::condition_variable moved;
    std::atomic<int> state{OK};  // what ncclCommGetAsyncError says
    std::atomic<bool> aborted{false};
    uint64_t issued = 0, finished = 0, splits = 0;
    int jobs = 0;       // threads that work for it
    bool busy = false;  // a task has its pipes
    std::vector<uint64_t> sent, received;  // messages to and from each rank
    std::vector<Scalar> scalars;
    std::vector<int> watched;  // pidfds of ranks on other hosts
    std::mt19937_64 chance;
    std::string said;
    ~Comm() { for (int fd : watched) if (fd >= 0) close(fd); }
    bool over() { return aborted || simcuda_over(); }
};
using Held = std::shared_ptr<Comm>;

struct Job { Held comm; std::function<int()> run; };
struct Group {
    int depth = 0, error = OK;
    std::vector<std::pair<Held, Operation>> operations;
    std::vector<Job> jobs;
};
struct World {
    std::mutex mutex;
    std::map<Comm*, Held> comms;
    std::map<std::string, int> ids;  // of this process: the fds of their boards
    std::string said;
};
World& world = *new World;
thread_local Group group;
using Lock = std::unique_lock<std::mutex>;

uint64_t number(const char* name, uint64_t otherwise) {
    const char* text = getenv(name);
    return text && *text ? strtoull(text, nullptr, 10) : otherwise;
}
const uint64_t SEED = number("SIMCUDA_SEED", 1);
const double DELAY = number("SIMCUDA_DELAY_MS", 5);
const bool HOSTS = number("SIMCUDA_NCCL_HOSTS", 0);  // each process is a host of its own

__attribute__((format(printf, 3, 4))) int fail(Comm* comm, int error, const char* format, ...) {
    char text[400];
    va_list rest;
    va_start(rest, format);
    vsnprintf(text, sizeof text, format, rest);
    va_end(rest);
    fprintf(stderr, "simcuda: NCCL: %s\n", text);
    Lock lock(world.mutex);
    world.said = text;
    if (comm) comm->said = text;
    return error;
}

void nap(Comm& comm) {
    double ms;
    {
        Lock lock(comm.mutex);
        ms = std::uniform_real_distribution<>(0, DELAY)(comm.chance);
    }
    std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms));
}

Held found(Comm* handle) {
    Lock lock(world.mutex);
    auto it = world.comms.find(handle);
    return it == world.comms.end() ? nullptr : it->second;
}

// The device of a communicator is this thread's, while it lives.
struct On {
    int before = 0;
    explicit On(int device) { cudaGetDevice(&before); cudaSetDevice(device); }
    ~On() { cudaSetDevice(before); }
};

// ---- waiting for other ranks

void ring(Seat& seat) {
    seat.bell++;
    syscall(SYS_futex, &seat.bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}
void ring_all(Comm& comm) {
    if (comm.board.at)
        for (int r = 0; r < comm.size; r++) ring(comm.board.seat(r));
}

// Tells of ranks on other hosts that are gone: their connections end, and what waits for them waits on.
void watch(Comm& comm) {
    if (!HOSTS || comm.state == REMOTE_ERROR) return;
    for (int r = 0; r < comm.size; r++) {
        pollfd one = {r < (int)comm.watched.size() ? comm.watched[r] : -1, POLLIN, 0};
        if (comm.board.seat(r).aborted || (one.fd >= 0 && poll(&one, 1, 0) == 1)) {
            comm.state = fail(&comm, REMOTE_ERROR, "rank %d of %d has lost the connection with rank %d", comm.rank, comm.size, r);
            return;
        }
    }
}

// Waits until it is done, or all is over. Returns whether it is done.
template <class Done>
bool wait_for(Comm& comm, Done done) {
    Seat& own = comm.board.seat(comm.rank);
    for (;;) {
        uint32_t heard = own.bell;
        if (done()) return true;
        if (comm.over()) return false;
        watch(comm);
        timespec look = {0, std::chrono::nanoseconds(LOOK).count()};
        syscall(SYS_futex, &own.bell, FUTEX_WAIT, heard, &look, nullptr, 0);
    }
}

// ---- messages

struct Label {  // goes before each message's bytes
    int kind, type, op, root;
    uint64_t count;
    bool operator==(const Label& o) const {
        return kind == o.kind && type == o.type && op == o.op && root == o.root && count == o.count;
    }
};
std::string text_of(const Label& label) {
    const char* type = label.type >= 0 && label.type < TYPES_ ? TYPES[label.type].name : "unknown";
    std::string text = std::string(KINDS[label.kind]) + " of " + std::to_string(label.count) + " " + type;
    if (label.op >= 0) text += ", operator " + std::to_string(label.op);
    if (label.root >= 0) text += ", root " + std::to_string(label.root);
    return text;
}

struct Message {
    Label label;
    char* at;
    uint64_t size, index, moved = 0;  // moved: with the label
    Label seen = {};                  // what the sender's says
    bool begun = false;
};

// All messages of some operations, which go at once. Those of one pair of ranks keep their order.
struct Traffic {
    Comm& comm;
    bool meets, wrong = false;  // meets: nothing is sent before its receiver is there
    std::vector<std::deque<Message>> out, in;

    Traffic(Comm& c, bool m) : comm(c), meets(m), out(c.size), in(c.size) {}
    void send(int to, const char* at, uint64_t size, const Label& label) {
        out[to].push_back({label, (char*)at, size, ++comm.sent[to]});
    }
    void receive(int from, char* at, uint64_t size, const Label& label) {
        in[from].push_back({label, at, size, ++comm.received[from]});
    }

    // Moves what there is room or bytes for, of the label and then of the message. Returns whether something moved.
    static bool move(Pipe& pipe, Message& m, Label& label, bool writes) {
        bool moved = false;
        while (m.moved < sizeof(Label) + m.size) {
            uint64_t written = pipe.written, read = pipe.read, position = writes ? written : read;
            uint64_t there = writes ? ROOM - (written - read) : written - read;
            bool of_label = m.moved < sizeof(Label);
            char* own = of_label ? (char*)&label + m.moved : m.at + (m.moved - sizeof(Label));
            uint64_t left = of_label ? sizeof(Label) - m.moved : sizeof(Label) + m.size - m.moved;
            uint64_t n = std::min({there, left, ROOM - position % ROOM});
            if (!n) break;
            if (writes) memcpy(pipe.data + position % ROOM, own, n), pipe.written += n;
            else memcpy(own, pipe.data + position % ROOM, n), pipe.read += n;
            m.moved += n;
            moved = true;
            if (!writes && m.moved == sizeof(Label)) break;  // it is looked at first
        }
        return moved;
    }

    bool step() {
        bool moved = false;
        for (int r = 0; r < comm.size; r++) {
            bool rings = false;
            while (!out[r].empty()) {
                Message& m = out[r].front();
                Pipe& pipe = comm.board.pipe(comm.rank, r);
                if (meets && pipe.asked < m.index) break;
                rings |= move(pipe, m, m.label, true);
                if (m.moved < sizeof(Label) + m.size) break;
                out[r].pop_front();
                moved = true;
            }
            while (!in[r].empty()) {
                Message& m = in[r].front();
                Pipe& pipe = comm.board.pipe(r, comm.rank);
                if (!m.begun) pipe.asked = m.index, m.begun = rings = true;
                if (m.moved < sizeof(Label)) {
                    rings |= move(pipe, m, m.seen, false);
                    if (m.moved < sizeof(Label)) break;
                    if (!(m.seen == m.label)) {
                        std::string theirs = text_of(m.seen), own = text_of(m.label);
                        fail(&comm, OK, "rank %d's %s met rank %d's %s, which waits without end", r, theirs.c_str(), comm.rank,
                             own.c_str());
                        wrong = true;
                        return false;
                    }
                }
                rings |= move(pipe, m, m.seen, false);
                if (m.moved < sizeof(Label) + m.size) break;
                in[r].pop_front();
                moved = true;
            }
            if (rings) ring(comm.board.seat(r)), moved = true;
        }
        return moved;
    }

    bool empty() {
        for (int r = 0; r < comm.size; r++) if (!out[r].empty() || !in[r].empty()) return false;
        return true;
    }

    // Returns false where all is over.
    bool flow() {
        return wait_for(comm, [&] {
            while (!wrong && step()) {}
            return !wrong && empty();
        });
    }
};

// ---- arithmetic

float of_half(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023, bits;
    if (exponent == 31) bits = sign | 0x7F800000 | fraction << 13;
    else if (exponent) bits = sign | (exponent + 112) << 23 | fraction << 13;
    else {
        float small = ldexpf((float)fraction, -24);
        return sign ? -small : small;
    }
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
uint16_t to_half(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint16_t sign = bits >> 16 & 0x8000;
    float size = fabsf(value);
    if (isnan(value)) return sign | 0x7E00;
    if (size >= 65520) return sign | 0x7C00;
    if (size < 6.103515625e-05f) return sign | (uint16_t)lrintf(ldexpf(size, 24));  // a number without a leading 1
    bits &= 0x7FFFFFFF;
    bits += 0xFFF + (bits >> 13 & 1);  // to the nearest, or the even one
    return sign | (uint16_t)((bits >> 13) - (112 << 10));
}
float of_bfloat(uint16_t b) {
    uint32_t bits = (uint32_t)b << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
uint16_t to_bfloat(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (isnan(value)) return 0x7FFF;
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

template <class T> struct Plain {
    using Wide = T;
    static T get(const char* at) { T x; memcpy(&x, at, sizeof x); return x; }
    static void put(char* at, T x) { memcpy(at, &x, sizeof x); }
};
template <float (*OF)(uint16_t), uint16_t (*TO)(float)> struct Narrow {
    using Wide = float;
    static float get(const char* at) { return OF(Plain<uint16_t>::get(at)); }
    static void put(char* at, float x) { Plain<uint16_t>::put(at, TO(x)); }
};

// NaN loses against a number in MAX and MIN, as it does in NCCL's.
template <class W> W combined(int op, W a, W b) {
    switch (op) {
        case PRODUCT: return a * b;
        case MAX: return a != a || a < b ? b : a;
        case MIN: return a != a || b < a ? b : a;
        default: return a + b;
    }
}

// Reduces what all ranks gave, in their order; each step is rounded to the type.
template <class N>
void reduce_of(const std::vector<const char*>& parts, char* to, uint64_t count, int size, int op, const char* scalar) {
    using W = typename N::Wide;
    int ranks = (int)parts.size();
    bool floating = (W)0.5 != 0;
    char part[8], rounded[8];
    W factor = 1;
    if (scalar) factor = N::get(scalar);
    if (op == AVERAGE && floating) N::put(rounded, (W)(1.0 / ranks)), factor = N::get(rounded);
    auto given = [&](int r, uint64_t i) {
        W x = N::get(parts[r] + i * size);
        if (!scalar && !(op == AVERAGE && floating)) return x;
        N::put(part, x * factor);
        return N::get(part);
    };
    for (uint64_t i = 0; i < count; i++) {
        W all = given(0, i);
        for (int r = 1; r < ranks; r++) {
            N::put(rounded, combined<W>(op, all, given(r, i)));
            all = N::get(rounded);
        }
        if (op == AVERAGE && !floating) all = all / (W)ranks;
        N::put(to + i * size, all);
    }
}

void reduce_to(const std::vector<const char*>& parts, char* to, uint64_t count, const Operation& o, const char* scalar) {
    int size = TYPES[o.type].size, op = o.op >= OPS_ ? (int)SUM : o.op;
    switch (o.type) {
        case INT8: return reduce_of<Plain<int8_t>>(parts, to, count, size, op, scalar);
        case UINT8: return reduce_of<Plain<uint8_t>>(parts, to, count, size, op, scalar);
        case INT32: return reduce_of<Plain<int32_t>>(parts, to, count, size, op, scalar);
        case UINT32: return reduce_of<Plain<uint32_t>>(parts, to, count, size, op, scalar);
        case INT64: return reduce_of<Plain<int64_t>>(parts, to, count, size, op, scalar);
        case UINT64: return reduce_of<Plain<uint64_t>>(parts, to, count, size, op, scalar);
        case FLOAT16: return reduce_of<Narrow<of_half, to_half>>(parts, to, count, size, op, scalar);
        case FLOAT32: return reduce_of<Plain<float>>(parts, to, count, size, op, scalar);
        case FLOAT64: return reduce_of<Plain<double>>(parts, to, count, size, op, scalar);
        case BFLOAT16: return reduce_of<Narrow<of_bfloat, to_bfloat>>(parts, to, count, size, op, scalar);
    }
}

// ---- operations, on the streams

using Bytes = std::vector<char>;

// Returns where a task may use what the caller named. An error sticks, as of an illegal access, where it may not.
char* inside(const void* pointer, uint64_t size) {
    static char none;
    if (!size) return &none;
    char* at = simcuda_inside(pointer, size);
    if (!at) simcuda_break(ILLEGAL_ADDRESS);
    return at;
}

// Does one collective. Returns false where all is over.
bool collective(Comm& comm, const Operation& o, bool meets) {
    int n = comm.size, me = comm.rank, width = TYPES[o.type].size;
    uint64_t one = o.count * width;
    bool root = me == o.root || o.root < 0;
    auto times = [&](bool all) { return all ? one * n : one; };
    bool reads = o.kind == BROADCAST || o.kind == SCATTER ? root : true;
    bool writes = o.kind == REDUCE || o.kind == GATHER ? root : true;
    char *from = nullptr, *to = nullptr;
    if (reads && !(from = inside(o.from, times(o.kind == SCATTER || o.kind == REDUCE_SCATTER || o.kind == ALL_TO_ALL)))) return false;
    if (writes && !(to = inside(o.to, times(o.kind == ALL_GATHER || o.kind == GATHER || o.kind == ALL_TO_ALL)))) return false;
    char scalar[8];
    if (o.scalar.on_device) {
        char* there = inside(o.scalar.at, width);
        if (!there) return false;
        memcpy(scalar, there, width);
    } else memcpy(scalar, o.scalar.bytes, 8);
    const char* factor = o.op >= OPS_ ? scalar : nullptr;

    Label label = {o.kind, o.type, std::min(o.op, (int)OPS_), o.root, o.count};
    Traffic traffic(comm, meets);
    std::vector<Bytes> got(n);
    std::vector<const char*> parts(n);
    // has every other rank send this one a part, which is reduced with this one's own
    auto gather_parts = [&](const char* own, uint64_t size) {
        for (int r = 0; r < n; r++) {
            if (r != me) {
                got[r].resize(size);
                traffic.receive(r, got[r].data(), size, label);
            }
            parts[r] = r == me ? own : got[r].data();
        }
    };
    switch (o.kind) {
        case ALL_REDUCE: {
            auto begin = [&](int r) { return o.count * r / n; };
            auto bytes = [&](int r) { return (begin(r + 1) - begin(r)) * width; };
            for (int r = 0; r < n; r++) if (r != me) traffic.send(r, from + begin(r) * width, bytes(r), label);
            gather_parts(from + begin(me) * width, bytes(me));
            if (!traffic.flow()) return false;
            Bytes made(bytes(me));
            reduce_to(parts, made.data(), begin(me + 1) - begin(me), o, factor);
            memcpy(to + begin(me) * width, made.data(), made.size());
            for (int r = 0; r < n; r++) {
                if (r == me) continue;
                traffic.send(r, made.data(), made.size(), label);
                traffic.receive(r, to + begin(r) * width, bytes(r), label);
            }
            return traffic.flow();
        }
        case REDUCE: {
            if (!root) traffic.send(o.root, from, one, label);
            else gather_parts(from, one);
            if (!traffic.flow()) return false;
            if (root) reduce_to(parts, to, o.count, o, factor);
            return true;
        }
        case REDUCE_SCATTER: {
            for (int r = 0; r < n; r++) if (r != me) traffic.send(r, from + r * one, one, label);
            gather_parts(from + me * one, one);
            if (!traffic.flow()) return false;
            reduce_to(parts, to, o.count, o, factor);
            return true;
        }
        case BROADCAST:
            if (root) for (int r = 0; r < n; r++) if (r != me) traffic.send(r, from, one, label);
            if (root) memmove(to, from, one);
            else traffic.receive(o.root, to, one, label);
            return traffic.flow();
        case ALL_GATHER:
            memmove(to + me * one, from, one);
            for (int r = 0; r < n; r++) if (r != me) traffic.send(r, to + me * one, one, label), traffic.receive(r, to + r * one, one, label);
            return traffic.flow();
        case GATHER:
            if (!root) traffic.send(o.root, from, one, label);
            else {
                memmove(to + me * one, from, one);
                for (int r = 0; r < n; r++) if (r != me) traffic.receive(r, to + r * one, one, label);
            }
            return traffic.flow();
        case SCATTER:
            if (!root) traffic.receive(o.root, to, one, label);
            else {
                for (int r = 0; r < n; r++) if (r != me) traffic.send(r, from + r * one, one, label);
                memmove(to, from + me * one, one);
            }
            return traffic.flow();
        default:
            memmove(to + me * one, from + me * one, one);
            for (int r = 0; r < n; r++) if (r != me) traffic.send(r, from + r * one, one, label), traffic.receive(r, to + r * one, one, label);
            return traffic.flow();
    }
}

// Sends of a group go at once with its receives, each when its receiver is there: outside a group they would wait for
// each other.
bool sends_and_receives(Comm& comm, const std::vector<Operation>& all) {
    Traffic traffic(comm, true);
    for (auto& o : all) {
        uint64_t bytes = o.count * TYPES[o.type].size;
        Label label = {SEND, o.type, -1, -1, o.count};
        char* at = inside(o.kind == SEND ? o.from : o.to, bytes);
        if (!at) return false;
        if (o.kind == SEND) traffic.send(o.root, at, bytes, label);
        else traffic.receive(o.root, at, bytes, label);
    }
    return traffic.flow();
}

struct Work {
    Held comm;
    std::vector<Operation> collectives, pairs;
    uint64_t ticket;
    bool captured, meets;
};

void run(void* data) {
    Work* work = (Work*)data;
    Comm& comm = *work->comm;
    bool goes;
    {
        // one after the other, in the order of their issue, on whichever streams; replays where they find room
        Lock lock(comm.mutex);
        while (!comm.over() && (comm.busy || (!work->captured && comm.finished != work->ticket))) comm.moved.wait_for(lock, LOOK);
        goes = !comm.over();
        comm.busy |= goes;
    }
    bool on = goes;
    for (auto& o : work->collectives) on = on && collective(comm, o, work->meets);
    if (on && !work->pairs.empty()) sends_and_receives(comm, work->pairs);
    {
        Lock lock(comm.mutex);
        if (goes) comm.busy = false;
        if (!work->captured) comm.finished++;
        comm.moved.notify_all();
    }
    if (!work->captured) delete work;
}

// Gives the stream the work, and has other streams of the group's wait for it, as it waits for them.
int enqueue(const Held& comm, const std::vector<Operation>& operations) {
    On on(comm->device);
    std::vector<void*> streams;
    auto work = new Work{comm, {}, {}, 0, false, false};
    for (auto& o : operations) {
        (o.kind == SEND || o.kind == RECEIVE ? work->pairs : work->collectives).push_back(o);
        if (std::find(streams.begin(), streams.end(), o.stream) == streams.end()) streams.push_back(o.stream);
    }
    auto follow = [](void* behind, void* before) {
        void* event;
        int error = cudaEventCreateWithFlags(&event, 2);
        if (!error) error = cudaEventRecord(event, before);
        if (!error) error = cudaStreamWaitEvent(behind, event, 0);
        if (!error) error = cudaEventDestroy(event);
        return error;
    };
    int error = 0;
    for (size_t i = 1; i < streams.size() && !error; i++) error = follow(streams[0], streams[i]);
    work->captured = simcuda_capturing(comm->device, streams[0]);
    {
        Lock lock(comm->mutex);
        work->meets = comm->chance() & 1;
        if (!work->captured) work->ticket = comm->issued++;
    }
    if (!error) error = simcuda_launch(comm->device, streams[0], run, work);
    for (size_t i = 1; i < streams.size() && !error; i++) error = follow(streams[i], streams[0]);
    if (error && !work->captured) comm->issued--;
    if (error) return fail(comm.get(), CUDA_ERROR, "an operation can't be given to the stream: CUDA's error %d", error);
    return OK;
}

// ---- groups, and calls that do not wait

// Does what a call has to do: at once, or on a thread where the communicator's calls do not wait.
int perform(std::vector<Job> jobs) {
    std::vector<std::thread> threads;
    std::vector<int> results(jobs.size(), OK);
    int result = OK;
    for (size_t i = 0; i < jobs.size(); i++) {
        Job job = jobs[i];
        if (job.comm->blocking) {
            if (jobs.size() == 1) results[i] = job.run();
            else threads.emplace_back([job, at = &results[i]] { *at = job.run(); });
            continue;
        }
        result = IN_PROGRESS;
        {
            Lock lock(job.comm->mutex);
            job.comm->jobs++;
            job.comm->state = IN_PROGRESS;
        }
        std::thread([job] {
            Comm& comm = *job.comm;
            nap(comm);
            int done = comm.over() ? (int)INTERNAL_ERROR : job.run();
            Lock lock(comm.mutex);
            if (!--comm.jobs && comm.state == IN_PROGRESS) comm.state = done;
            comm.moved.notify_all();
        }).detach();
    }
    for (auto& thread : threads) thread.join();
    for (int one : results) if (one) result = one;
    return result;
}

// Returns whether a communicator takes calls, as a result.
int ready(Comm* handle, const char* name) {
    Held comm = found(handle);
    if (!comm) return fail(nullptr, INVALID_ARGUMENT, "%s: there is no such communicator", name);
    if (comm->state == IN_PROGRESS)
        return fail(comm.get(), INVALID_ARGUMENT, "%s: the communicator's previous call is not done yet", name);
    return comm->state;
}

int end_group() {
    Group done;
    std::swap(done, group);
    if (done.error) {
        for (auto& job : done.jobs) job.comm->state = done.error;
        return done.error;
    }
    std::vector<Held> comms;
    std::map<Comm*, std::vector<Operation>> of;
    for (auto& [comm, o] : done.operations) {
        if (!of.count(comm.get())) comms.push_back(comm);
        of[comm.get()].push_back(o);
    }
    std::vector<Job> jobs = std::move(done.jobs);
    for (auto& comm : comms) {
        auto& operations = of[comm.get()];
        int own = 0;
        for (auto& o : operations)
            if (o.root == comm->rank) own += o.kind == SEND ? 1 : o.kind == RECEIVE ? -1 : 0;
        if (own) return fail(comm.get(), INVALID_USAGE, "rank %d sends to itself without a receive, or the reverse", comm->rank);
        if (!comm->blocking) jobs.push_back({comm, [comm, operations] { return enqueue(comm, operations); }});
        else if (int error = enqueue(comm, operations)) return error;
    }
    return perform(std::move(jobs));
}

int issue(Operation o, Comm* handle, const char* name) {
    int error = ready(handle, name);
    Held comm = found(handle);
    bool rooted = o.kind == REDUCE || o.kind == BROADCAST || o.kind == GATHER || o.kind == SCATTER;
    bool reduces = o.kind == ALL_REDUCE || o.kind == REDUCE || o.kind == REDUCE_SCATTER;
    if (!rooted && o.kind != SEND && o.kind != RECEIVE) o.root = -1;
    if (error) {}
    else if (o.root >= comm->size || (o.root < 0 && (rooted || o.kind == SEND || o.kind == RECEIVE)))
        error = fail(comm.get(), INVALID_ARGUMENT, "%s: rank %d of %d is named", name, o.root, comm->size);
    else if (o.type < 0 || o.type >= TYPES_) error = fail(comm.get(), INVALID_ARGUMENT, "%s: type %d", name, o.type);
    else if (reduces && (o.op < 0 || o.op >= OPS_ + (int)comm->scalars.size()))
        error = fail(comm.get(), INVALID_ARGUMENT, "%s: operator %d", name, o.op);
    else if (reduces && o.type >= FLOAT8E4M3)  // the devices are of version 8
        error = fail(comm.get(), INVALID_ARGUMENT, "%s: FP8 reduction support begins with sm90 capable devices", name);
    else if (reduces && o.op >= OPS_) {
        o.scalar = comm->scalars[o.op - OPS_];
        if (o.scalar.type != o.type) error = fail(comm.get(), INVALID_ARGUMENT, "%s: operator %d is of another type", name, o.op);
    }
    if (error) {
        if (group.depth) group.error = error;
        return error;
    }
    if (!o.count && o.kind != SEND && o.kind != RECEIVE) return OK;
    group.operations.push_back({comm, o});
    return group.depth ? (int)OK : end_group();
}

// ---- communicators

int open_of(int pid, int fd, uint64_t inode) {
    std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
    int opened = open(path.c_str(), O_RDWR | O_CLOEXEC);
    struct stat status;
    if (opened >= 0 && (fstat(opened, &status) || status.st_ino != inode)) {  // another file by now
        close(opened);
        return -1;
    }
    return opened;
}

int new_board(uint64_t* inode) {
    int fd = memfd_create("simcuda nccl", MFD_CLOEXEC);
    struct stat status;
    if (fd < 0 || ftruncate(fd, PAGE) || fstat(fd, &status)) return -1;
    *inode = status.st_ino;
    return fd;
}

// Takes a rank's seat, and waits until all have.
int join(Comm& comm, int fd) {
    bool there = comm.board.open(fd, comm.size);
    close(fd);
    if (!there) return fail(&comm, SYSTEM_ERROR, "shared memory: %s", strerror(errno));
    int size = 0;
    if (!comm.board.head().size.compare_exchange_strong(size, comm.size) && size != comm.size)
        return fail(&comm, INTERNAL_ERROR, "rank %d says that there are %d ranks, another one %d", comm.rank, comm.size, size);
    Seat& own = comm.board.seat(comm.rank);
    int nobody = 0;
    if (!own.pid.compare_exchange_strong(nobody, getpid()))
        return fail(&comm, INTERNAL_ERROR, "rank %d of %d ranks has already checked in", comm.rank, comm.size);
    cudaDeviceGetPCIBusId(own.bus, sizeof own.bus, comm.device);
    own.here = 1;
    ring_all(comm);
    bool all = wait_for(comm, [&] {
        for (int r = 0; r < comm.size; r++) if (!comm.board.seat(r).here) return false;
        return true;
    });
    if (!all) return fail(&comm, INTERNAL_ERROR, "rank %d of %d was given up before all were there", comm.rank, comm.size);
    for (int r = 0; r < comm.size; r++) {
        Seat& other = comm.board.seat(r);
        if (r != comm.rank && !strcmp(own.bus, other.bus) && (!HOSTS || other.pid == getpid()))
            return fail(&comm, INVALID_USAGE, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %s", comm.rank, r, own.bus);
        if (HOSTS) comm.watched.push_back(other.pid == getpid() ? -1 : (int)syscall(SYS_pidfd_open, other.pid.load(), 0));
    }
    return OK;
}

struct Config { size_t size; unsigned magic, version; int blocking; };

// Makes a communicator's object; who has the handle may ask for its state from here on.
int make(Comm** handle, int size, int rank, const Config* config, bool otherwise, Held* made) {
    *handle = nullptr;
    if (size < 1 || rank < 0 || rank >= size) return fail(nullptr, INVALID_ARGUMENT, "rank %d of %d", rank, size);
    auto comm = std::make_shared<Comm>();
    if (cudaGetDevice(&comm->device)) return fail(nullptr, CUDA_ERROR, "there is no device");
    comm->blocking = otherwise;
    if (config) {
        if (config->magic != 0xcafebeef) return fail(nullptr, INVALID_ARGUMENT, "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
        if (config->version >= 21400 && config->blocking != INT_MIN) {
            if (config->blocking != 0 && config->blocking != 1)
                return fail(nullptr, INVALID_ARGUMENT, "Invalid config blocking attribute value %d", config->blocking);
            comm->blocking = config->blocking;
        }
    }
    comm->rank = rank;
    comm->size = size;
    comm->sent.resize(size);
    comm->received.resize(size);
    Lock lock(world.mutex);
    comm->chance.seed(SEED * 1000003 + rank);
    world.comms[comm.get()] = comm;
    *handle = comm.get();
    *made = comm;
    return OK;
}

void forget(Comm* handle) {
    Lock lock(world.mutex);
    world.comms.erase(handle);
}

int do_or_collect(Job job) {
    if (group.depth) {
        if (!job.comm->blocking) job.comm->state = IN_PROGRESS;
        group.jobs.push_back(std::move(job));
        return OK;
    }
    return perform({std::move(job)});
}

int init(Comm** handle, int size, const Bytes128& id, int rank, const Config* config) {
    Held comm;
    if (int error = make(handle, size, rank, config, true, &comm)) {
        if (group.depth) group.error = error;
        return error;
    }
    auto run = [comm, id] {
        Id told;
        memcpy(&told, id.bytes, sizeof told);
        int fd = memcmp(told.sign, "simnccl", 8) ? -1 : open_of(told.pid, told.fd, told.inode);
        if (fd < 0) return fail(comm.get(), REMOTE_ERROR, "rank %d finds nobody who has made its unique id", comm->rank);
        On on(comm->device);
        int error = join(*comm, fd);
        Lock lock(world.mutex);
        auto own = world.ids.find(std::string(id.bytes, 128));
        if (!error && own != world.ids.end()) {  // all have it open
            close(own->second);
            world.ids.erase(own);
        }
        return error;
    };
    return do_or_collect({comm, run});
}

}  // namespace

// ---- versions and errors

EXPORT int ncclGetVersion(int* version) {
    if (!version) return INVALID_ARGUMENT;
    *version = VERSION;
    return OK;
}
EXPORT const char* ncclGetErrorString(int result) {
    switch (result) {
        case OK: return "no error";
        case CUDA_ERROR: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
        case SYSTEM_ERROR: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
        case INTERNAL_ERROR: return "internal error - please report this issue to the NCCL developers";
        case INVALID_ARGUMENT: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
        case INVALID_USAGE: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
        case REMOTE_ERROR: return "remote process exited or there was a network error";
        case IN_PROGRESS: return "NCCL operation in progress";
        default: return "unknown result code";
    }
}
EXPORT const char* ncclGetLastError(Comm* handle) {
    Held comm = found(handle);
    static thread_local std::string kept;
    Lock lock(world.mutex);
    kept = comm ? comm->said : world.said;
    return kept.c_str();
}

// ---- communicators

EXPORT int ncclGetUniqueId(Bytes128* id) {
    Id made = {"simnccl", getpid(), -1, 0, {}};
    made.fd = new_board(&made.inode);
    if (made.fd < 0 || getrandom(made.chance, sizeof made.chance, 0) < 0) return fail(nullptr, SYSTEM_ERROR, "shared memory: %s", strerror(errno));
    memset(id->bytes, 0, sizeof id->bytes);
    memcpy(id->bytes, &made, sizeof made);
    Lock lock(world.mutex);
    world.ids[std::string(id->bytes, 128)] = made.fd;
    return OK;
}
EXPORT int ncclCommInitRankConfig(Comm** handle, int size, Bytes128 id, int rank, const Config* config) {
    return init(handle, size, id, rank, config);
}
EXPORT int ncclCommInitRank(Comm** handle, int size, Bytes128 id, int rank) { return init(handle, size, id, rank, nullptr); }
EXPORT int ncclCommInitRankScalable(Comm** handle, int size, int rank, int ids, Bytes128* all, const Config* config) {
    if (ids < 1) return fail(nullptr, INVALID_ARGUMENT, "%d unique ids", ids);
    return init(handle, size, all[0], rank, config);
}
EXPORT int ncclGroupStart() { group.depth++; return OK; }
EXPORT int ncclGroupEnd() {
    if (!group.depth) return fail(nullptr, INVALID_USAGE, "ncclGroupEnd: not in a group call.");
    if (group.depth > 1) { group.depth--; return OK; }
    return end_group();
}
EXPORT int ncclCommInitAll(Comm** handles, int devices, const int* list) {
    int there = 0;
    if (cudaGetDeviceCount(&there) || devices < 1 || (!list && devices > there))
        return fail(nullptr, INVALID_ARGUMENT, "%d of %d devices", devices, there);
    Bytes128 id;
    if (int error = ncclGetUniqueId(&id)) return error;
    On on(0);
    ncclGroupStart();
    for (int i = 0; i < devices; i++) {
        if (cudaSetDevice(list ? list[i] : i)) group.error = fail(nullptr, INVALID_USAGE, "there is no device %d", list[i]);
        else init(&handles[i], devices, id, i, nullptr);
    }
    return ncclGroupEnd();
}
// Each rank tells the others its color and key, and of a board, of which the first rank's of a color is taken.
EXPORT int ncclCommSplit(Comm* handle, int color, int key, Comm** child, const Config* config) {
    if (int error = ready(handle, "ncclCommSplit")) return error;
    Held comm = found(handle), made;
    *child = nullptr;
    if (color >= 0) {
        On on(comm->device);
        if (int error = make(child, comm->size, comm->rank, config, comm->blocking, &made)) return error;
        made->state = IN_PROGRESS;
    }
    auto run = [comm, made, color, key] {
        uint64_t inode, round = ++comm->splits;
        int fd = new_board(&inode);
        if (fd < 0) return fail(comm.get(), SYSTEM_ERROR, "shared memory: %s", strerror(errno));
        Seat& own = comm->board.seat(comm->rank);
        auto all = [&](std::atomic<uint64_t> Seat::*what, uint64_t least) {
            return wait_for(*comm, [&] {
                for (int r = 0; r < comm->size; r++) if (comm->board.seat(r).*what < least) return false;
                return true;
            });
        };
        std::vector<int> ranks;
        int error = OK, of = -1;
        if (all(&Seat::heard, round - 1)) {
            own.color = color, own.key = key, own.fd = fd, own.inode = inode;
            own.split = round;
            ring_all(*comm);
        }
        if (!all(&Seat::split, round)) error = fail(comm.get(), INTERNAL_ERROR, "rank %d's split was given up", comm->rank);
        for (int r = 0; r < comm->size; r++) if (comm->board.seat(r).color == color) ranks.push_back(r);
        std::stable_sort(ranks.begin(), ranks.end(), [&](int a, int b) { return comm->board.seat(a).key < comm->board.seat(b).key; });
        if (!error && made) {
            Seat& first = comm->board.seat(ranks[0]);
            of = open_of(first.pid, first.fd, first.inode);
            if (of < 0) error = fail(comm.get(), REMOTE_ERROR, "rank %d of a split is gone", ranks[0]);
        }
        own.heard = round;
        ring_all(*comm);
        if (!error && made) {
            made->size = (int)ranks.size();
            made->rank = (int)(std::find(ranks.begin(), ranks.end(), comm->rank) - ranks.begin());
            error = join(*made, of);
        } else if (!error && !all(&Seat::heard, round)) error = INTERNAL_ERROR;
        close(fd);
        if (made) made->state = error;
        return error;
    };
    return do_or_collect({comm, run});
}
EXPORT int ncclCommFinalize(Comm* handle) {
    if (int error = ready(handle, "ncclCommFinalize")) return error;
    Held comm = found(handle);
    return do_or_collect({comm, [comm] {
        Lock lock(comm->mutex);
        while (comm->finished < comm->issued && !comm->over()) comm->moved.wait_for(lock, LOOK);
        return (int)OK;
    }});
}
EXPORT int ncclCommDestroy(Comm* handle) {
    if (!handle) return OK;
    Held comm = found(handle);
    if (!comm) return fail(nullptr, INVALID_ARGUMENT, "ncclCommDestroy: there is no such communicator");
    {
        Lock lock(comm->mutex);
        while (comm->blocking && comm->finished < comm->issued && !comm->over()) comm->moved.wait_for(lock, LOOK);
    }
    forget(handle);
    return OK;
}
EXPORT int ncclCommAbort(Comm* handle) {
    if (!handle) return OK;
    Held comm = found(handle);
    if (!comm) return fail(nullptr, INVALID_ARGUMENT, "ncclCommAbort: there is no such communicator");
    comm->aborted = true;
    forget(handle);
    Lock lock(comm->mutex);
    comm->moved.notify_all();
    if (comm->board.at) {
        comm->board.seat(comm->rank).aborted = 1;
        ring_all(*comm);
    }
    while (comm->busy || comm->jobs) comm->moved.wait_for(lock, LOOK);  // what has begun ends; what has not does nothing
    return OK;
}
EXPORT int ncclCommGetAsyncError(Comm* handle, int* error) {
    Held comm = found(handle);
    if (!comm || !error) return INVALID_ARGUMENT;
    *error = comm->state;
    return OK;
}
EXPORT int ncclCommCount(Comm* handle, int* count) {
    if (int error = ready(handle, "ncclCommCount")) return error;
    *count = found(handle)->size;
    return OK;
}
EXPORT int ncclCommCuDevice(Comm* handle, int* device) {
    if (int error = ready(handle, "ncclCommCuDevice")) return error;
    *device = found(handle)->device;
    return OK;
}
EXPORT int ncclCommUserRank(Comm* handle, int* rank) {
    if (int error = ready(handle, "ncclCommUserRank")) return error;
    *rank = found(handle)->rank;
    return OK;
}
// How many there are in this process: none may be left of what a program has ended.
EXPORT int simcuda_communicators() {
    Lock lock(world.mutex);
    return (int)world.comms.size();
}

// ---- operators that multiply

EXPORT int ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int residence, Comm* handle) {
    if (int error = ready(handle, "ncclRedOpCreatePreMulSum")) return error;
    Held comm = found(handle);
    if (type < 0 || type >= FLOAT8E4M3) return fail(comm.get(), INVALID_ARGUMENT, "ncclRedOpCreatePreMulSum: type %d", type);
    Scalar made = {residence == 0, {}, scalar, type};
    if (residence) memcpy(made.bytes, scalar, TYPES[type].size);
    Lock lock(comm->mutex);
    *op = OPS_ + (int)comm->scalars.size();
    comm->scalars.push_back(made);
    return OK;
}
EXPORT int ncclRedOpDestroy(int op, Comm* handle) {
    if (int error = ready(handle, "ncclRedOpDestroy")) return error;
    Held comm = found(handle);
    if (op < OPS_ || op >= OPS_ + (int)comm->scalars.size()) return fail(comm.get(), INVALID_ARGUMENT, "ncclRedOpDestroy: operator %d", op);
    return OK;  // work that was issued has its number
}

// ---- operations

EXPORT int ncclAllReduce(const void* from, void* to, size_t count, int type, int op, Comm* comm, void* stream) {
    return issue({ALL_REDUCE, from, to, count, type, op, -1, stream, {}}, comm, "ncclAllReduce");
}
EXPORT int ncclReduce(const void* from, void* to, size_t count, int type, int op, int root, Comm* comm, void* stream) {
    return issue({REDUCE, from, to, count, type, op, root, stream, {}}, comm, "ncclReduce");
}
EXPORT int ncclReduceScatter(const void* from, void* to, size_t count, int type, int op, Comm* comm, void* stream) {
    return issue({REDUCE_SCATTER, from, to, count, type, op, -1, stream, {}}, comm, "ncclReduceScatter");
}
EXPORT int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, Comm* comm, void* stream) {
    return issue({BROADCAST, from, to, count, type, -1, root, stream, {}}, comm, "ncclBroadcast");
}
EXPORT int ncclBcast(void* both, size_t count, int type, int root, Comm* comm, void* stream) {
    return issue({BROADCAST, both, both, count, type, -1, root, stream, {}}, comm, "ncclBcast");
}
EXPORT int ncclAllGather(const void* from, void* to, size_t count, int type, Comm* comm, void* stream) {
    return issue({ALL_GATHER, from, to, count, type, -1, -1, stream, {}}, comm, "ncclAllGather");
}
EXPORT int ncclAlltoAll(const void* from, void* to, size_t count, int type, Comm* comm, void* stream) {
    return issue({ALL_TO_ALL, from, to, count, type, -1, -1, stream, {}}, comm, "ncclAlltoAll");
}
EXPORT int ncclGather(const void* from, void* to, size_t count, int type, int root, Comm* comm, void* stream) {
    return issue({GATHER, from, to, count, type, -1, root, stream, {}}, comm, "ncclGather");
}
EXPORT int ncclScatter(const void* from, void* to, size_t count, int type, int root, Comm* comm, void* stream) {
    return issue({SCATTER, from, to, count, type, -1, root, stream, {}}, comm, "ncclScatter");
}
EXPORT int ncclSend(const void* from, size_t count, int type, int peer, Comm* comm, void* stream) {
    return issue({SEND, from, nullptr, count, type, -1, peer, stream, {}}, comm, "ncclSend");
}
EXPORT int ncclRecv(void* to, size_t count, int type, int peer, Comm* comm, void* stream) {
    return issue({RECEIVE, nullptr, to, count, type, -1, peer, stream, {}}, comm, "ncclRecv");
}
