// The threads that all operations share.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>

// Adds the ticks of the processor's clock that pass in its life to a counter, if there is one.
class Stopwatch {
public:
    explicit Stopwatch(int64_t* to) : to_(to), start_(to ? __rdtsc() : 0) {}
    ~Stopwatch() {
        if (to_) __atomic_fetch_add(to_, static_cast<int64_t>(__rdtsc() - start_), __ATOMIC_RELAXED);
    }
    Stopwatch(const Stopwatch&) = delete;

private:
    int64_t* const to_;
    const uint64_t start_;
};

// Workers that spin for a moment between operations and sleep between steps. A job's tasks are taken one by one,
// so a worker that is slow to wake, or loses its core to another process, delays the job by one task at most.
class Pool {
public:
    explicit Pool(int threads) : size(threads) {
        for (int i = 1; i < threads; ++i) std::thread([this, i] { work(i); }).detach();
    }

    const int size;

    // Which of a job's threads this is, in [0, size): the caller of run is 0.
    static int self() { return self_; }

    // Calls `body(task)` for every task; `ticks` are what they take, summed over threads.
    template <class Body>
    void run(int tasks, const Body& body, int64_t* ticks = nullptr) {
        const auto timed = [&](int task) {
            const Stopwatch watch(ticks);
            body(task);
        };
        share(tasks, timed);
    }

    // Runs `body(row)` over rows; little work stays on the calling thread.
    template <class Body>
    void rows(int count, size_t work, const Body& body, int64_t* ticks = nullptr) {
        const int tasks = work < 16384 ? 1 : std::min(count, size * 4);
        const int each = (count + tasks - 1) / tasks;
        const auto some = [&](int task) {
            for (int row = task * each; row < std::min((task + 1) * each, count); ++row) body(row);
        };
        run(tasks, some, ticks);
    }

private:
    template <class Body>
    void share(int tasks, const Body& body) {
        if (size == 1 || tasks == 1) {
            for (int i = 0; i < tasks; ++i) body(i);
            return;
        }
        const std::lock_guard lock(mutex_);  // one job at a time
        call_ = [](const void* context, int task) { (*static_cast<const Body*>(context))(task); };
        context_ = &body;
        tasks_ = tasks;
        next_.store(0, std::memory_order_relaxed);
        epoch_.fetch_add(1);  // odd: open
        epoch_.notify_all();
        drain();
        epoch_.fetch_add(1);  // even: closed. Workers that joined before have raised active_, and are waited for.
        for (int spins = 0; active_.load() != 0; ++spins) {
            if (spins < 4096) _mm_pause();
            else std::this_thread::yield();
        }
    }

    void drain() {
        for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;) call_(context_, i);
    }

    void work(int number) {
        self_ = number;
        for (unsigned seen = 0;;) {
            const unsigned now = await(seen);
            active_.fetch_add(1);
            if (epoch_.load() == now && now % 2 == 1) drain();
            active_.fetch_sub(1);
            seen = now;
        }
    }

    unsigned await(unsigned seen) {
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(100);
        for (int spins = 1;; ++spins) {
            const unsigned now = epoch_.load(std::memory_order_acquire);
            if (now != seen) return now;
            _mm_pause();
            if (spins % 64 == 0 && std::chrono::steady_clock::now() > deadline) epoch_.wait(seen);
        }
    }

    inline static thread_local int self_ = 0;
    std::mutex mutex_;
    std::atomic<unsigned> epoch_{0};
    std::atomic<int> active_{0};
    alignas(64) std::atomic<int> next_{0};
    void (*call_)(const void*, int) = nullptr;
    const void* context_ = nullptr;
    int tasks_ = 0;
};
