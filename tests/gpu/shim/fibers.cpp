// Fibers, the scheduler of a block, and warp operations.
#include "fibers.hpp"

#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#include <thread>

#if defined(__SANITIZE_THREAD__)
extern "C" {
void *__tsan_get_current_fiber();
void *__tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void *);
void __tsan_switch_to_fiber(void *, unsigned);
void __tsan_acquire(void *);
void __tsan_release(void *);
}
#define RELEASE(at) __tsan_release(at)
#define ACQUIRE(at) __tsan_acquire(at)
#else
#define RELEASE(at) ((void)0)
#define ACQUIRE(at) ((void)0)
#endif
#if defined(__SANITIZE_ADDRESS__)
extern "C" {
void __sanitizer_start_switch_fiber(void **, const void *, size_t);
void __sanitizer_finish_switch_fiber(void *, const void **, size_t *);
}
#endif

// Saves what a function must keep, changes stacks, and goes on where the other one stopped.
extern "C" void shim_switch(void **save, void *load);
#if defined(__x86_64__)
__asm__(".text\n.globl shim_switch\n.type shim_switch,@function\nshim_switch:\n"
        " pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
        " movq %rsp,(%rdi)\n movq %rsi,%rsp\n"
        " popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n"
        ".size shim_switch,.-shim_switch\n");
#else
#error "fibers are written for x86-64"
#endif

namespace shim {
namespace {

constexpr uint32_t WARP = 32;
constexpr size_t STACK = 64 << 10;

enum class State : uint8_t { ready, at_barrier, at_warp, done };

struct Fiber {
    void *stack_pointer;
    uint32_t number;
    State state;
    Kind kind;
    uint32_t mask, argument;
    uint64_t value, result;
    char *stack;
    void *tsan, *fake_stack;
};

struct Block {
    uint32_t index;
    std::vector<Fiber> fibers;
    std::vector<uint32_t> order;
    void *stack_pointer;
    void *tsan, *fake_stack;
    const void *stack_bottom;
    size_t stack_size;
    const std::function<void()> *body;
    // places that the sanitizer orders memory by
    char start, end, barrier;
    char warps[32];
};

thread_local Block *block;
thread_local Fiber *fiber;

// Stacks of the fibers of a thread. They are kept from one block to the next: new ones cost a page fault each.
struct Stacks {
    char *start = nullptr;
    size_t bytes = 0;
    char *of(uint32_t threads) {
        if (STACK * threads <= bytes) return start;
        release();
        void *room = mmap(nullptr, STACK * threads, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (room == MAP_FAILED) abort();
        bytes = STACK * threads;
        return start = (char *)room;
    }
    void release() {
        if (start) munmap(start, bytes);
        start = nullptr, bytes = 0;
    }
    ~Stacks() { release(); }
};
thread_local Stacks kept;

[[noreturn]] void fail(const char *what) {
    fprintf(stderr, "shim: %s (block %u, thread %u)\n", what, block->index, fiber ? fiber->number : ~0u);
    abort();
}

UNSEEN void leave(bool for_good) {
    Fiber *self = fiber;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(for_good ? nullptr : &self->fake_stack, block->stack_bottom, block->stack_size);
#endif
#if defined(__SANITIZE_THREAD__)
    // 1: switching orders nothing, only barriers do
    __tsan_switch_to_fiber(block->tsan, 1);
#endif
    (void)for_good;
    shim_switch(&self->stack_pointer, block->stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fiber->fake_stack, nullptr, nullptr);
#endif
}

UNSEEN void begin() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &block->stack_bottom, &block->stack_size);
#endif
    ACQUIRE(&block->start);
    (*block->body)();
    RELEASE(&block->end);
    fiber->state = State::done;
    leave(true);
}

UNSEEN void enter(Fiber &next) {
    fiber = &next;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&block->fake_stack, next.stack, STACK);
#endif
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(next.tsan, 1);
#endif
    shim_switch(&block->stack_pointer, next.stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(block->fake_stack, nullptr, nullptr);
#endif
    fiber = nullptr;
}

// What each lane gets, once all of a mask have come.
UNSEEN void answer(Fiber *lanes, uint32_t mask) {
    uint32_t votes = 0;
    for (uint32_t l = 0; l < WARP; ++l)
        if (mask >> l & 1) votes |= (uint32_t)(lanes[l].value & 1) << l;
    for (uint32_t l = 0; l < WARP; ++l) {
        if (!(mask >> l & 1)) continue;
        Fiber &one = lanes[l];
        uint32_t from = l;
        if (one.kind == Kind::index) from = one.argument % WARP;
        if (one.kind == Kind::up && l >= one.argument) from = l - one.argument;
        if (one.kind == Kind::exclusive_or) from = l ^ one.argument;
        if (from >= WARP || !(mask >> from & 1)) {
            fiber = &one;
            fail("a shuffle reads a lane that does not take part");
        }
        one.result = one.kind == Kind::ballot ? votes : lanes[from].value;
    }
    for (uint32_t l = 0; l < WARP; ++l)
        if (mask >> l & 1) lanes[l].state = State::ready;
}

// Ends warp operations that all their lanes have come to; says whether there was one.
UNSEEN bool serve(Fiber *lanes) {
    for (uint32_t l = 0; l < WARP; ++l) {
        Fiber &one = lanes[l];
        if (one.state != State::at_warp) continue;
        fiber = &one;
        if (!(one.mask >> l & 1)) fail("a lane is not in its own mask");
        bool all = true;
        for (uint32_t other = 0; other < WARP; ++other) {
            if (!(one.mask >> other & 1)) continue;
            if (lanes[other].state == State::done) fail("a mask names a lane that has ended");
            all = all && lanes[other].state == State::at_warp;
            if (lanes[other].state == State::at_warp && (lanes[other].mask != one.mask || lanes[other].kind != one.kind))
                fail("lanes of a warp ask for different things");
        }
        fiber = nullptr;
        if (!all) continue;
        answer(lanes, one.mask);
        return true;
    }
    fiber = nullptr;
    return false;
}

// Runs all fibers of a block to their end.
UNSEEN void schedule(Block &b) {
    const uint32_t count = (uint32_t)b.fibers.size();
    uint32_t done = 0;
    RELEASE(&b.start);
    while (done < count) {
        bool moved = false;
        for (uint32_t at : b.order) {
            if (b.fibers[at].state != State::ready) continue;
            enter(b.fibers[at]);
            moved = true;
            done += b.fibers[at].state == State::done;
        }
        for (uint32_t first = 0; first < count; first += WARP) moved |= serve(&b.fibers[first]);
        if (moved) continue;
        for (Fiber &one : b.fibers) {
            if (one.state == State::at_barrier) continue;
            fiber = &one;
            fail(one.state == State::done ? "a barrier after some threads have ended" : "a barrier or warp operation that not all reach");
        }
        for (Fiber &one : b.fibers) one.state = State::ready;
    }
    ACQUIRE(&b.end);
}

// The order in which fibers take turns: forwards, backwards, or shuffled.
std::vector<uint32_t> order_of(uint32_t count, uint32_t turn) {
    std::vector<uint32_t> order(count);
    for (uint32_t i = 0; i < count; ++i) order[i] = turn % 3 == 1 ? count - 1 - i : i;
    uint64_t random = turn * 0x9e3779b97f4a7c15ull + 1;
    for (uint32_t i = count; turn % 3 == 2 && i > 1; --i) {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        std::swap(order[i - 1], order[random % i]);
    }
    return order;
}

void run_block(uint32_t index, uint32_t threads, const std::function<void()> &body) {
    char *stacks = kept.of(threads);
    Block b{};
    b.index = index;
    b.body = &body;
    b.order = order_of(threads, index);
    b.fibers.resize(threads);
#if defined(__SANITIZE_THREAD__)
    b.tsan = __tsan_get_current_fiber();
#endif
    for (uint32_t i = 0; i < threads; ++i) {
        Fiber &one = b.fibers[i];
        one.number = i;
        one.stack = stacks + STACK * i;
        void **top = (void **)(one.stack + STACK - 64);
        *--top = nullptr;
        *--top = (void *)begin;
        one.stack_pointer = top - 6;
#if defined(__SANITIZE_THREAD__)
        one.tsan = __tsan_create_fiber(0);
#endif
    }
    block = &b;
    schedule(b);
    block = nullptr;
#if defined(__SANITIZE_THREAD__)
    for (Fiber &one : b.fibers) __tsan_destroy_fiber(one.tsan);
#endif
}

} // namespace

UNSEEN Place thread_index() { return {fiber->number}; }
UNSEEN Place block_index() { return {block->index}; }

UNSEEN void wait_for_block() {
    fiber->state = State::at_barrier;
    RELEASE(&block->barrier);
    leave(false);
    ACQUIRE(&block->barrier);
}

UNSEEN uint64_t warp(Kind kind, uint32_t mask, uint64_t value, uint32_t argument) {
    Fiber *self = fiber;
    self->kind = kind, self->mask = mask, self->value = value, self->argument = argument;
    self->state = State::at_warp;
    // of all warp operations this one alone orders memory
    char *ordered = kind == Kind::sync ? &block->warps[self->number / WARP] : nullptr;
    if (ordered) RELEASE(ordered);
    leave(false);
    if (ordered) ACQUIRE(ordered);
    return self->result;
}

std::vector<Kernel> &kernels() {
    static std::vector<Kernel> all;
    return all;
}

void launch(uint32_t blocks, uint32_t threads, const std::function<void()> &body) {
#if defined(__SANITIZE_THREAD__)
    // a thread for each block, so that races between blocks are seen; a few at a time
    for (uint32_t first = 0; first < blocks; first += 8) {
        std::vector<std::thread> some;
        for (uint32_t i = first; i < blocks && i < first + 8; ++i) some.emplace_back(run_block, i, threads, std::ref(body));
        for (std::thread &one : some) one.join();
    }
#else
    for (uint32_t i = 0; i < blocks; ++i) run_block(i, threads, body);
#endif
}

} // namespace shim
