/* AMX instructions for processors without them: the handler of SIGILL does what the instruction would do, and goes on
 * behind it. Written after Intel's Software Developer's Manual: what it calls #UD or #GP ends the process. Knows the
 * instructions that the linears use: ldtilecfg, tilerelease, tilezero, tileloadd, tilestored, tdpbsud.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

enum { REGISTERS = 8, MOST_ROWS = 16, MOST_BYTES = 64 };

typedef struct {
    int rows, row_bytes;
    uint8_t data[MOST_ROWS][MOST_BYTES];
} Register;

static _Thread_local Register registers[REGISTERS];
static _Thread_local int is_configured;
static long executed;

static const int GENERAL[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

static void refuse(const char *why, const uint8_t *code) {
    fprintf(stderr, "illegal instruction, %s:", why);
    for (int i = 0; i < 12; i++) fprintf(stderr, " %02x", code[i]);
    fprintf(stderr, "\n");
    _exit(70);
}

static Register *valid(int number, const uint8_t *code) {
    if (!is_configured || number >= REGISTERS || !registers[number].rows) refuse("a register without a shape", code);
    return &registers[number];
}

static void configure(const uint8_t *told, const uint8_t *code) {
    Register made[REGISTERS] = {0};
    for (int i = 2; i < 64; i++) {
        int known = (i >= 16 && i < 32) || (i >= 48 && i < 56);
        if (!known && told[i]) refuse("reserved bytes of a configuration", code);
    }
    if (told[0] != 1 || told[1]) refuse("another palette", code);
    for (int n = 0; n < REGISTERS; n++) {
        uint16_t row_bytes;
        memcpy(&row_bytes, told + 16 + 2 * n, 2);
        made[n].rows = told[48 + n];
        made[n].row_bytes = row_bytes;
        if (made[n].rows > MOST_ROWS || row_bytes > MOST_BYTES || row_bytes % 4 || !made[n].rows != !row_bytes)
            refuse("a shape that is none", code);
    }
    memcpy(registers, made, sizeof made);
    is_configured = 1;
}

static void multiply(Register *sums, const Register *left, const Register *right, const uint8_t *code) {
    if (sums == left || sums == right || left == right) refuse("one register twice", code);
    int fits = sums->rows == left->rows && sums->row_bytes == right->row_bytes && left->row_bytes == 4 * right->rows;
    if (!fits) refuse("shapes that do not fit", code);
    for (int m = 0; m < sums->rows; m++)
        for (int n = 0; n < sums->row_bytes / 4; n++) {
            int32_t sum;
            memcpy(&sum, &sums->data[m][4 * n], 4);
            for (int k = 0; k < right->rows; k++)
                for (int i = 0; i < 4; i++)
                    sum += (int32_t)(int8_t)left->data[m][4 * k + i] * (int32_t)right->data[k][4 * n + i];
            memcpy(&sums->data[m][4 * n], &sum, 4);
        }
}

static void emulate(int signal_number, siginfo_t *info, void *raw) {
    (void)signal_number, (void)info;
    greg_t *general = ((ucontext_t *)raw)->uc_mcontext.gregs;
    const uint8_t *code = (const uint8_t *)general[REG_RIP];
    /* VEX with three bytes, map 0F38, 128 bits, W0. */
    if (code[0] != 0xC4 || (code[1] & 0x1F) != 2 || (code[2] & 0x84)) refuse("no AMX", code);
    int prefix = code[2] & 3, opcode = code[3], modrm = code[4], length = 5;
    int mod = modrm >> 6, reg = (modrm >> 3 & 7) | (code[1] & 0x80 ? 0 : 8), rm = modrm & 7;
    uint8_t *address = NULL;
    int64_t stride = 0;
    if (mod != 3) {
        int base = rm | (code[1] & 0x20 ? 0 : 8), has_index = 0;
        if (rm == 4) {
            int sib = code[length++], index = (sib >> 3 & 7) | (code[1] & 0x40 ? 0 : 8);
            base = (sib & 7) | (code[1] & 0x20 ? 0 : 8);
            has_index = index != 4;
            stride = has_index ? general[GENERAL[index]] << (sib >> 6) : 0;
        }
        if (opcode == 0x4B && rm != 4) refuse("no SIB byte", code);
        int32_t moved = 0;
        if (mod == 0 && (base & 7) == 5) refuse("an address without base", code);
        if (mod == 1) moved = (int8_t)code[length++];
        if (mod == 2) memcpy(&moved, code + length, 4), length += 4;
        address = (uint8_t *)(general[GENERAL[base]] + moved);
    }
    if (opcode == 0x49 && prefix == 0 && mod != 3 && reg == 0) {
        configure(address, code);
    } else if (opcode == 0x49 && prefix == 0 && modrm == 0xC0) {
        memset(registers, 0, sizeof registers);
        is_configured = 0;
    } else if (opcode == 0x49 && prefix == 3 && mod == 3 && rm == 0) {
        memset(valid(reg, code)->data, 0, sizeof registers[0].data);
    } else if (opcode == 0x4B && prefix == 3 && mod != 3) {
        Register *to = valid(reg, code);
        memset(to->data, 0, sizeof to->data);
        for (int m = 0; m < to->rows; m++) memcpy(to->data[m], address + m * stride, to->row_bytes);
    } else if (opcode == 0x4B && prefix == 2 && mod != 3) {
        const Register *from = valid(reg, code);
        for (int m = 0; m < from->rows; m++) memcpy(address + m * stride, from->data[m], from->row_bytes);
    } else if (opcode == 0x5E && prefix == 2 && mod == 3) {
        int right = (~code[2] >> 3 & 0xF);
        multiply(valid(reg, code), valid(rm, code), valid(right, code), code);
    } else {
        refuse("an instruction that is not known here", code);
    }
    __atomic_add_fetch(&executed, 1, __ATOMIC_RELAXED);
    general[REG_RIP] += length;
}

/* Return 0 when instructions are emulated from now on. */
int emulate_amx(void) {
    struct sigaction action = {0};
    action.sa_sigaction = emulate;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    return sigaction(SIGILL, &action, NULL);
}

long amx_instructions(void) { return executed; }
